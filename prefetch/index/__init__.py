"""Records of images: in the store (`catalogue`) and on this node (`node_catalogue`).

Also public: `records` and `chains` (documents), `merge` (layers to one tree), and
`stream_contents` (which file each byte of a stream belongs to). May import of `prefetch`: `cache`.
"""
