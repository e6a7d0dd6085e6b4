"""What a start spent its time on: reads timelines, and explains them.

`sources` finds the timelines, `read` makes the graph of a start, `explain` says all of it, and
`text`, `page` and `export` show that to people and programs. `others` has what other programs know.
"""
