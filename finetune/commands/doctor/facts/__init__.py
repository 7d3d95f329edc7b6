"""Facts of machines, ranks and jobs: frozen records of plain values that can be written to JSON and sent.

`gather/` fills them in and `checks/` reads nothing else, so a recorded file is checked as the machine itself would be.
Unknown keys of a newer version are ignored.
"""
