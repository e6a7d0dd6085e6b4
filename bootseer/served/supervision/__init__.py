"""Supervision: a process that holds a mount and replaces its workers when they die or hang.

Public: `supervisor.supervise`, `supervisor.RestartPolicy`, `heartbeat.silence_for`, `hand_over`.
"""
