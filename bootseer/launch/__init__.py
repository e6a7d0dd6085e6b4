"""`bootseer run`: one start of a job, from the command line's options to `exec` of the command.

Public: `start.launch`, `job.Job`, `attendant`, `slurm`, `standby`, `doctor`, `formats`, and
`caches` for kept caches. May import all of `prefetch`, `snapshots` and `fuse`; only
`bootseer.cli` imports this package.
"""
