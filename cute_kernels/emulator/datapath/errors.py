"""The one exception that data paths raise: an operand value the instruction set does not allow."""

from __future__ import annotations


class IllegalOperand(ValueError):
    """An operand, descriptor or shape that the PTX ISA forbids (or that this emulator does not support, and says so).

    Attributes:
        field: the operand or descriptor field at fault, such as ``"idesc.N"``.
        value: its value.
        rule: the rule it breaks, in words.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        shown = f"0x{value:x}" if isinstance(value, int) and value > 0xFFFF else repr(value)
        super().__init__(f"{field} = {shown}: {rule}")
