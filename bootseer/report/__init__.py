"""The report of a start: reads its timelines and explains where the time went.

Public: `sources.find_start`, `read.read_graph`, `explain.StartModel`, and `text`, `page` and
`export`, which show an `explain.Analysis`; `others` parses the output of schedulers and tools.
May import `base`, `linux`, `settings`, `store` and `timeline`; only `sources`, `read` and
`others.placing` do I/O.
"""
