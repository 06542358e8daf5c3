"""Records of one file, by format, from any number on: each a text, or what is wrong with it.

All formats hold to the same: a record that is no text is a `Problem`, which the caller counts. A file that cannot be
read to its end is a `UserError`, because a cut file must never pass for a shorter one.
"""
