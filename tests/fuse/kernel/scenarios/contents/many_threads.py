"""Scenario: many threads."""

import os
import threading

from testbed.mounts.scenario import read, say, write


def work(n: int) -> None:
    for i in range(20):
        name = f"{n}-{i}"
        write(name, name.encode() * 1000)
        assert read(name) == name.encode() * 1000
        os.rename(name, name + "x")
        os.stat(name + "x")
        (os.unlink(name + "x") if i % 2 else None)


threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for t in threads:
    t.start()
for t in threads:
    t.join()
say(len(os.listdir(".")))
