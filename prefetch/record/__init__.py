"""Records of what starts read: traces, hints of other tools, and the hot set merged from traces.

Public: the modules `trace`, `hints`, `hotset`; `file_rows` is their common codec. May import of
`prefetch`: nothing.
"""
