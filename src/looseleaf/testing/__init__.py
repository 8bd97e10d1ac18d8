"""The test kit that ships with looseleaf: fake runner, oracle, state machines. Needs no torch."""
