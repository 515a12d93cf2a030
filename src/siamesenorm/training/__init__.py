"""Recipes, and the runs that the training engine makes of them."""
