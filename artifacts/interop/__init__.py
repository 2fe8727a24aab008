"""Reads and writes other tools' files of head patterns, and reports what does not fit.

No code of those tools is used and none of their files is copied: the formats are described where
they are read.
"""
