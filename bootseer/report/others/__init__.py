"""What other programs know of a start: schedulers, kubelets, NCCL.

There is a parser for each format (bytes in, stages out; pure), and one way to put these stages
beside our own.
"""
