"""Text for people: secrets left out, odd names quoted, misspelt words, progress."""
