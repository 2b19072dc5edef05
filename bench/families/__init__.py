"""`python -m bench.families`: which families of transformers' decoders Spool serves, by trying all of them."""
