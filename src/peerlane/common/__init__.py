"""What all rooms use: places and nodes where ranks run, files, the version, words of messages. No torch here."""
