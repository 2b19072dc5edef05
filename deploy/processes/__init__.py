"""`spool serve --no-ray`: scheduler, workers and gateways as processes of one machine, and what keeps them running."""
