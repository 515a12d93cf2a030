"""Corpora and the token arrays that the training engine reads."""
