"""Trains a drafting head on text that its target writes."""
