"""Scenario: statfs."""

import os

from testbed.mounts.scenario import say

s = os.statvfs(".")
say(s.f_namemax, s.f_frsize, s.f_blocks)
