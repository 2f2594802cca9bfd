"""Data sets: read LeRobot folders, say what is wrong with them, prepare them for training, write new ones."""
