"""`bootseer run`: one start of a job. `start` owns the order of its stages, `checkpoints` and
`image` one stage each, `signals` what a signal does before the job has taken over.

Only this package and `bootseer.cli` know `prefetch`, `snapshots` and `fuse` together.
"""
