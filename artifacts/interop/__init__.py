"""Other tools' files of head patterns, read into artifacts and written from them, with a report of
what does not fit.

No code of those tools is used and none of their files is copied: the formats are described where
they are read."""
