"""The tables of the pages, a module for each subject; see tables.py."""
