"""The table from exceptions to errno values and exit codes."""

import errno

import pytest

from bootseer import errors


def test_every_class_has_an_errno_and_its_own_exit_code() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.BootseerError)
        and value is not errors.SetupFailedError
    ]
    codes = {errors.exit_code_of(cls("x")) for cls in classes}
    assert len(codes) == len(classes)
    assert all(errors.errno_of(cls("x")) > 0 for cls in classes)


@pytest.mark.parametrize(
    ("error", "number", "code"),
    [
        (errors.NotFoundError("x"), errno.ENOENT, 10),
        (errors.DeadlineError("x"), errno.ETIMEDOUT, 14),
        (FileNotFoundError(errno.ENOENT, "x"), errno.ENOENT, 10),
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC, 13),
        (OSError(errno.ENOTEMPTY, "x"), errno.ENOTEMPTY, 1),
        (ValueError("x"), errno.EIO, 1),
        (errors.SetupFailedError("x", 42), errno.EIO, 42),
    ],
)
def test_each_error_has_its_errno_and_exit_code(
    error: BaseException, number: int, code: int
) -> None:
    assert errors.errno_of(error) == number
    assert errors.exit_code_of(error) == code


def test_ours_are_caught_as_the_builtins() -> None:
    with pytest.raises(FileNotFoundError, match="no such snapshot"):
        raise errors.NotFoundError("no such snapshot")


def test_from_oserror_says_what_was_tried() -> None:
    ours = errors.from_oserror(OSError(errno.ENOSPC, "No space left"), "write /x")
    assert isinstance(ours, errors.NoSpaceError)
    assert str(ours) == "cannot write /x: No space left"


def test_from_oserror_leaves_one_of_ours_as_it_is() -> None:
    """A named fault: a full cache was reported as a failure to read the file to be cached."""
    full = errors.NoSpaceError("cannot write to the cache in /c: No space left on device")
    again = errors.from_oserror(full, "read /image/file")
    assert (type(again), str(again)) == (errors.NoSpaceError, str(full))
    assert again is not full
