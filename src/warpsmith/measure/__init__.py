"""What a machine is and how fast it goes: timing, tables, facts for `bench` and `doctor`."""
