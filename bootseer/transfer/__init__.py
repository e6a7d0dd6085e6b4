"""Moves ranges of stored objects: a pure plan, and an executor that carries it out.

fetches = plan(wanted, is_cached)            # bootseer.transfer.plan, pure
batch = executor.submit(fetches, deliver)    # bootseer.transfer.executor
executor.demand(chunk, deliver)              # returns when that chunk has been delivered
"""
