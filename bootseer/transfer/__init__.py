"""Reads of stored bytes: a pure plan, and the engine that carries it out.

    fetches = plan(wanted, is_cached)           # bootseer.transfer.ranges, pure
    batch = fetcher.submit(fetches, deliver)    # bootseer.transfer.chunks
    fetcher.demand(chunk, deliver)              # returns when that chunk has been delivered

`engine` does the reads, for chunk fetchers and for checkpoints. `policy` decides about retries of
failed reads, `pace` about second requests for slow reads. May import `base` and `errors` only.
"""
