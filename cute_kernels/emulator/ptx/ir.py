"""The data a parsed PTX module is made of.

Registers, variables and labels are resolved by the parser (PTX scopes may reuse names), so that two operands that mean the
same register are the same `Reg` object.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Register classes: one letter names the storage a register lives in.
#   p predicate, h 16 bit, w 32 bit, d 64 bit, q 128 bit
WIDTH_CLASS = {1: "p", 8: "h", 16: "h", 32: "w", 64: "d", 128: "q"}
TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64,
    "b128": 128, "e4m3x2": 16, "e5m2x2": 16, "e4m3x4": 32, "e5m2x4": 32, "e2m1x2": 8, "u16x2": 32, "s16x2": 32, "b8x4": 32,
}  # fmt: skip


class PtxError(ValueError):
    """The text is not PTX this front end reads; the message starts with the PTX line."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(f"PTX line {line}: {message}" if line else message)
        self.line = line


class UnsupportedInstruction(PtxError):
    """A well-formed instruction that the machine has no implementation of."""


class Reg:
    """One virtual register. `index` counts registers of the same class within one entry, after inlining."""

    __slots__ = ("name", "type", "cls", "index")

    def __init__(self, name: str, type_: str) -> None:
        self.name = name
        self.type = type_
        self.cls = WIDTH_CLASS[TYPE_BITS[type_]]
        self.index = -1

    def __repr__(self) -> str:
        return self.name


class Special:
    """A special register such as %tid.x."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Imm:
    """A literal: `value` is a Python int, or a float for 0f/0d/decimal-float literals (`bits` then holds the pattern)."""

    __slots__ = ("value", "bits", "kind")

    def __init__(self, value: int | float, kind: str = "int", bits: int = 0) -> None:
        self.value = value
        self.kind = kind  # int, f32, f64
        self.bits = bits

    def __repr__(self) -> str:
        return repr(self.value)


class Var:
    """A variable or parameter: `space` is param, shared, global, const or local; `size` in bytes (0 for extern [])."""

    __slots__ = ("name", "space", "size", "align", "type", "init", "offset", "extern", "array", "owner", "code")

    def __init__(self, name: str, space: str, size: int, align: int, type_: str, *, init=None, extern=False, array=False):
        self.name, self.space, self.size, self.align, self.type = name, space, size, align, type_
        self.init, self.extern, self.array = init, extern, array
        self.offset = -1  # assigned by the layout step
        self.owner = None  # entry or function that declares a .param variable in its signature
        self.code = ""  # a function whose address the initialiser holds, itself or by way of another variable

    def __repr__(self) -> str:
        return self.name


class Sym:
    """The address of a variable, plus a constant."""

    __slots__ = ("var", "offset")

    def __init__(self, var: Var, offset: int = 0) -> None:
        self.var, self.offset = var, offset

    def __repr__(self) -> str:
        return f"{self.var.name}+{self.offset}" if self.offset else self.var.name


class FunctionRef:
    """The address of a function."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class LabelRef:
    __slots__ = ("name", "scope", "target")

    def __init__(self, name: str, scope) -> None:
        self.name, self.scope, self.target = name, scope, None

    def __repr__(self) -> str:
        return self.name


class Vec:
    """{a, b, ...}"""

    __slots__ = ("items",)

    def __init__(self, items: list) -> None:
        self.items = items

    def __repr__(self) -> str:
        return "{" + ", ".join(map(repr, self.items)) + "}"


class Mem:
    """[base + offset] or, for tensor copies, [base, {coordinates}] with the coordinates in `extra`."""

    __slots__ = ("base", "offset", "extra")

    def __init__(self, base, offset: int = 0, extra=None) -> None:
        self.base, self.offset, self.extra = base, offset, extra

    def __repr__(self) -> str:
        tail = f"+{self.offset}" if self.offset else ""
        return f"[{self.base!r}{tail}" + (f", {self.extra!r}]" if self.extra is not None else "]")


class Pair:
    """d|p, as in setp and shfl and elect."""

    __slots__ = ("first", "second")

    def __init__(self, first, second) -> None:
        self.first, self.second = first, second

    def __repr__(self) -> str:
        return f"{self.first!r}|{self.second!r}"


class Not:
    """!p as an operand."""

    __slots__ = ("reg",)

    def __init__(self, reg: Reg) -> None:
        self.reg = reg

    def __repr__(self) -> str:
        return f"!{self.reg!r}"


class Sink:
    """The bit bucket `_`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "_"


class Paren:
    """(a, b): argument lists of call."""

    __slots__ = ("items",)

    def __init__(self, items: list) -> None:
        self.items = items

    def __repr__(self) -> str:
        return "(" + ", ".join(map(repr, self.items)) + ")"


class Instr:
    """One instruction. `op` is the full dotted name, `mods` its parts after the mnemonic, `loc` = (file number, line)."""

    __slots__ = ("op", "base", "mods", "operands", "pred", "pred_neg", "line", "loc", "index", "callee", "inline", "data")

    def __init__(self, op: str, operands: list, pred, pred_neg: bool, line: int, loc: tuple[int, int]) -> None:
        self.op = op
        parts = op.split(".")
        self.base = parts[0]
        self.mods = tuple(parts[1:])
        self.operands = operands
        self.pred, self.pred_neg = pred, pred_neg
        self.line, self.loc = line, loc
        self.index = -1
        self.callee = None
        self.inline = ()  # names of the functions it was inlined from, outermost first
        self.data = None  # what the decoder leaves for the machine

    def __repr__(self) -> str:
        pre = f"@{'!' if self.pred_neg else ''}{self.pred!r} " if self.pred is not None else ""
        return f"{pre}{self.op} {', '.join(map(repr, self.operands))};"


class Label:
    __slots__ = ("name", "line", "index")

    def __init__(self, name: str, line: int) -> None:
        self.name, self.line = name, line
        self.index = -1

    def __repr__(self) -> str:
        return self.name + ":"


@dataclass
class Function:
    """An .entry or .func. `body` holds Instr and Label objects in order; declarations without a body have body None."""

    name: str
    is_entry: bool
    params: list[Var] = field(default_factory=list)
    returns: list[Var] = field(default_factory=list)
    body: list | None = None
    variables: list[Var] = field(default_factory=list)
    directives: dict[str, tuple] = field(default_factory=dict)
    targets: dict[str, list] = field(default_factory=dict)
    line: int = 0


@dataclass
class Module:
    """A parsed file: `variables` are module-level, `files` maps .file numbers to paths."""

    version: tuple[int, int] = (0, 0)
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Var] = field(default_factory=list)
    files: dict[int, str] = field(default_factory=dict)
    text: str = ""

    @property
    def entries(self) -> list[str]:
        """Names of the kernels, in file order."""
        return [f.name for f in self.functions.values() if f.is_entry and f.body is not None]
