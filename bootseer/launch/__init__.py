"""`bootseer run`: one start of a job, from the command line's options to `exec` of the command.

Public: `start.launch`, `job.Job`, `attendant`, `slurm`, `standby`, `doctor`, `formats`, and
`caches` for kept caches. Only this package and `bootseer.cli` import `prefetch`, `snapshots` and
`fuse` together; nothing but `bootseer.cli` imports this package.
"""
