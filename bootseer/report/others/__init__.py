"""Stages that other programs know: Slurm, Kubernetes, NCCL, and any that writes OTLP.

Public: one pure parser per format, from bytes to `ForeignStage`, or CorruptError;
`placing.ForeignStages` assigns them to nodes; `placing.ask_slurm` runs Slurm's commands.
May import `report.graph`, `report.decoding`, `report.sources` and what `report` imports.
"""
