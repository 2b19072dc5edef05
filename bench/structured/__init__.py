"""What structured output costs: see __main__.py."""
