"""Pure checks: facts in, findings out. They ask neither the machine nor a clock."""
