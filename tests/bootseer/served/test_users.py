import os
from pathlib import Path

import pytest

from bootseer.errors import DeadlineError
from bootseer.served import users
from bootseer.served.service import new_service_dir, take_lock


def test_a_stuck_holder_of_the_users_lock_is_waited_for_until_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "LOCK_S", 0.05)
    state_dir = new_service_dir(tmp_path)
    lock = take_lock(state_dir, name="users.lock")
    with pytest.raises(DeadlineError, match=state_dir.name):
        users.add_user(state_dir, None)
    assert users.unmount_if_unused(state_dir) is None
    os.close(lock)
    users.add_user(state_dir, None)
    assert users.is_kept(state_dir)
