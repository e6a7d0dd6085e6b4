"""Count of the docstrings that cannot be understood on their own (tools/plain_words.py)."""

from tools.plain_words import read_docstrings

_SOURCE = '''
"""Chunks of an image."""
def first():
    """What is read next."""
def second():
    """Return the chunk, for whoever asks."""
def third():
    """Return the chunk.

    What is missing is read.
    """
def fourth(): ...
class Frame:
    size_bytes: int
    """How much is sent."""
    digest: bytes | None
    """None if the frame is empty."""
'''


def test_first_words_and_phrases_of_first_paragraphs_are_counted() -> None:
    found = {one.paragraph: one[2:] for one in read_docstrings(_SOURCE)}
    assert found == {
        "Chunks of an image.": (False, False),
        "What is read next.": (True, True),
        "Return the chunk, for whoever asks.": (False, True),
        "Return the chunk.": (False, False),
        "How much is sent.": (True, False),
        "None if the frame is empty.": (False, False),
    }
