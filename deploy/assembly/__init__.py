"""What services need of a configuration, whoever starts them: secrets, traces, a gateway's settings. Free of Ray."""
