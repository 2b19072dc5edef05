"""What steps of a pair of models cost where they run, for `spool plan`."""
