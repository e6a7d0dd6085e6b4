"""What other programs know about a start: schedulers, kubelets, NCCL. A parser for each of their
formats (bytes in, stages out; pure), and one way to put these stages beside our own.
"""
