"""The image of the lab's workers: its build, and the programs in it."""
