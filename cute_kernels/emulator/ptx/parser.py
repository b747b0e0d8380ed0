"""Reads PTX text (ISA 8.x and 9.x) into `ir.Module`.

The lexer is one regular expression; the parser is recursive descent over its tokens. Names are looked up through the scopes
that braces open, as inline assembly in compiled kernels declares the same register and label names again and again.
"""

from __future__ import annotations

import re
import struct

from .ir import (
    TYPE_BITS,
    Function,
    FunctionRef,
    Imm,
    Instr,
    Label,
    LabelRef,
    Mem,
    Module,
    Not,
    Pair,
    Paren,
    PtxError,
    Reg,
    Sink,
    Special,
    Sym,
    Var,
    Vec,
)

_TOKEN = re.compile(
    r"""(?P<ws>[ \t\r\f]+)
  | (?P<nl>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<num>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
       |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>\.[A-Za-z_][\w$]*(?:::[\w$]+)*|[%$A-Za-z_][\w$]*(?:(?:::|\.)[\w$]+)*)
  | (?P<str>"[^"\n]*")
  | (?P<punct>[{}()\[\];,:@!|+\-<>=*/&~])
""",
    re.VERBOSE | re.DOTALL,
)

_SPECIAL_ROOTS = {
    "%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clusterid",
    "%nclusterid", "%cluster_ctaid", "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
    "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi", "%clock64",
    "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size",
    "%reserved_smem_offset_begin", "%reserved_smem_offset_end", "%reserved_smem_offset_cap", "%current_graph_exec",
}  # fmt: skip
_VECTOR_FIELDS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
_SPACES = {".param", ".shared", ".global", ".const", ".local"}


class _Scope:
    __slots__ = ("parent", "names", "ranges", "labels")

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.names: dict = {}
        self.ranges: list[tuple[str, int, str]] = []  # (prefix, count, type) of `%r<N>` declarations
        self.labels: dict[str, Label] = {}

    def find(self, name: str):
        scope = self
        while scope is not None:
            hit = scope.names.get(name)
            if hit is not None:
                return hit
            for prefix, count, type_ in scope.ranges:
                if name.startswith(prefix):
                    tail = name[len(prefix) :]
                    if tail.isdigit() and int(tail) < count and (tail == "0" or tail[0] != "0"):
                        reg = Reg(name, type_)
                        scope.names[name] = reg
                        return reg
            scope = scope.parent
        return None


def parse_number(text: str) -> Imm:
    """The literal forms of the ISA: 0fXXXXXXXX, 0dX16, hexadecimal, binary, octal, decimal, decimal float."""
    low = text.lower()
    if low.startswith("0f") and len(text) == 10:
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<f", struct.pack("<I", bits))[0], "f32", bits)
    if low.startswith("0d") and len(text) == 18:
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<d", struct.pack("<Q", bits))[0], "f64", bits)
    body = low.rstrip("u")
    if body.startswith("0x"):
        return Imm(int(body, 16))
    if body.startswith("0b"):
        return Imm(int(body, 2))
    if "." in body or "e" in body:
        value = float(body)
        return Imm(value, "f64", struct.unpack("<Q", struct.pack("<d", value))[0])
    if len(body) > 1 and body[0] == "0":
        return Imm(int(body, 8))
    return Imm(int(body))


class _Parser:
    def __init__(self, text: str) -> None:
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.lines: list[int] = []
        line, pos, n = 1, 0, len(text)
        match = _TOKEN.match
        while pos < n:
            m = match(text, pos)
            if m is None:
                raise PtxError(f"unexpected character {text[pos]!r}", line)
            kind = m.lastgroup
            pos = m.end()
            if kind == "ws":
                continue
            if kind == "nl":
                line += 1
                continue
            if kind == "comment":
                line += m.group().count("\n")
                continue
            self.kinds.append(kind)
            self.texts.append(m.group())
            self.lines.append(line)
        self.kinds.append("end")
        self.texts.append("")
        self.lines.append(line)
        self.i = 0
        self.module = Module(text=text)
        self.scope = _Scope(None)
        self.function: Function | None = None
        self.loc = (0, 0)

    # -- token helpers
    def error(self, message: str) -> PtxError:
        return PtxError(message, self.lines[self.i])

    def peek(self) -> str:
        return self.texts[self.i]

    def take(self) -> str:
        text = self.texts[self.i]
        self.i += 1
        return text

    def expect(self, text: str) -> None:
        if self.texts[self.i] != text:
            raise self.error(f"expected {text!r}, found {self.texts[self.i]!r}")
        self.i += 1

    def accept(self, text: str) -> bool:
        if self.texts[self.i] == text and self.kinds[self.i] != "str":
            self.i += 1
            return True
        return False

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        if self.kinds[self.i] != "num":
            raise self.error(f"expected a number, found {self.peek()!r}")
        value = parse_number(self.take()).value
        return sign * int(value)

    def skip_line(self) -> None:
        line = self.lines[self.i - 1]
        while self.lines[self.i] == line and self.kinds[self.i] != "end":
            self.i += 1

    def skip_braces(self) -> None:
        while self.peek() != "{":
            self.i += 1
        depth = 0
        while True:
            text = self.take()
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return
            if self.kinds[self.i] == "end":
                raise self.error("unbalanced braces")

    # -- module level
    def parse(self) -> Module:
        while self.kinds[self.i] != "end":
            text = self.peek()
            if text == ".version":
                self.i += 1
                major, _, minor = self.take().partition(".")
                self.module.version = (int(major), int(minor or 0))
            elif text == ".target":
                self.i += 1
                self.module.target = self.take()
                while self.accept(","):
                    self.i += 1
            elif text == ".address_size":
                self.i += 1
                if self.integer() != 64:
                    raise self.error("only .address_size 64 is supported")
            elif text == ".file":
                self.parse_file()
            elif text == ".loc":
                self.parse_loc()
            elif text == ".section":
                self.skip_braces()
            elif text == ".pragma":
                while self.take() != ";":
                    pass
            elif text in (".visible", ".extern", ".weak", ".common"):
                self.parse_linked()
            elif text in (".entry", ".func"):
                self.parse_function(extern=False)
            elif text in _SPACES:
                self.parse_variables(self.module.variables, extern=False)
            elif text == ".alias":
                while self.take() != ";":
                    pass
            elif text == ";":
                self.i += 1
            else:
                raise self.error(f"unexpected {text!r} at module level")
        self.mark_function_addresses()
        return self.module

    def mark_function_addresses(self) -> None:
        """Addresses of functions have no value here: variables that hold one, or point at one that does, are marked, not filled."""
        holds = {name: name for name in self.module.functions}
        left = self.module.variables
        while True:
            named = {v: name for v in left for kind, name, _ in (x for x in v.init or () if isinstance(x, tuple)) if name in holds}
            if not named:
                return
            for var, name in named.items():
                var.code, var.init = holds[name], None
                holds.setdefault(var.name, var.code)
            left = [v for v in left if v not in named]

    def parse_linked(self) -> None:
        extern = False
        while self.peek() in (".visible", ".extern", ".weak", ".common"):
            extern |= self.take() == ".extern"
        if self.peek() in (".entry", ".func"):
            self.parse_function(extern)
        else:
            self.parse_variables(self.module.variables, extern)

    def parse_file(self) -> None:
        self.i += 1
        number = self.integer()
        self.module.files[number] = self.take().strip('"')
        while self.accept(","):
            self.i += 1

    def parse_loc(self) -> None:
        self.i += 1
        first = self.i
        file_number, line = self.integer(), self.integer()
        if line:
            self.loc = (file_number, line)
        start = self.lines[first]
        while self.lines[self.i] == start and self.kinds[self.i] != "end":
            self.i += 1

    def parse_variables(self, out: list[Var], extern: bool) -> None:
        space = self.take()[1:]
        space = space.split("::")[0]
        align, vector = 0, 1
        while True:
            text = self.peek()
            if text == ".align":
                self.i += 1
                align = self.integer()
            elif text in (".v2", ".v4", ".v8"):
                vector = int(self.take()[2:])
            elif text == ".attribute":
                while self.take() != ")":
                    pass
            elif text == ".ptr":
                self.i += 1
            elif text in _SPACES:
                self.i += 1
            else:
                break
        type_ = self.take()[1:]
        if type_ not in TYPE_BITS:
            raise self.error(f"unknown type .{type_} of a variable")
        element = TYPE_BITS[type_] // 8 * vector
        while True:
            name = self.take()
            count, array = 1, False
            while self.accept("["):
                array = True
                count = 0 if self.peek() == "]" else count * self.integer()
                self.expect("]")
            var = Var(name, space, element * count, align or element, type_, extern=extern, array=array)
            if self.accept("="):
                var.init = self.parse_initialiser()
                if array and var.size == 0:
                    var.size = element * len(var.init)
            out.append(var)
            self.scope.names[name] = var
            if self.accept(";"):
                return
            self.expect(",")

    def parse_initialiser(self) -> list:
        """A flat list of numbers and of (variable name, offset, mask shift) address items, in element order."""
        if not self.accept("{"):
            return [self.initial_item()]
        items: list = []
        while not self.accept("}"):
            if self.peek() == "{":
                items += self.parse_initialiser()
            else:
                items.append(self.initial_item())
            if not self.accept(","):
                self.expect("}")
                break
        return items

    def initial_item(self):
        sign = -1 if self.accept("-") else 1
        if self.kinds[self.i] == "num":
            imm = parse_number(self.take())
            if self.peek() == "(":  # 0xFF(name): one byte of an address
                mask = int(imm.value)
                self.i += 1
                name = self.take()
                self.expect(")")
                return ("byte", name, (mask.bit_length() - 1) // 8)
            return sign * imm.value if imm.kind == "int" else Imm(sign * imm.value, imm.kind, imm.bits)
        name = self.take()
        if name == "generic":
            self.expect("(")
            name = self.take()
            self.expect(")")
        offset = 0
        if self.accept("+"):
            offset = self.integer()
        return ("address", name, offset)

    def parse_params(self, owner: Function) -> list[Var]:
        params: list[Var] = []
        self.expect("(")
        while not self.accept(")"):
            text = self.take()
            if text not in (".param", ".reg"):
                raise self.error(f"expected .param, found {text!r}")
            align = 0
            while self.peek() in (".align", ".ptr", ".global", ".shared", ".const", ".local"):
                if self.take() == ".align":
                    align = self.integer()
            type_ = self.take()[1:]
            while self.peek() in (".align", ".ptr", ".global", ".shared", ".const", ".local"):
                if self.take() == ".align":
                    self.integer()  # alignment of what a pointer points at
            if type_ not in TYPE_BITS:
                raise self.error(f"unknown parameter type .{type_}")
            size = TYPE_BITS[type_] // 8
            name = self.take()
            array = False
            while self.accept("["):
                array = True
                size = 0 if self.peek() == "]" else size * self.integer()
                self.expect("]")
            var = Var(name, "param", size, align or max(1, TYPE_BITS[type_] // 8), type_, array=array)
            var.owner = owner
            params.append(var)
            if not self.accept(","):
                self.expect(")")
                break
        return params

    def parse_function(self, extern: bool) -> None:
        line = self.lines[self.i]
        is_entry = self.take() == ".entry"
        while self.peek() == ".attribute":
            while self.take() != ")":
                pass
        function = Function("", is_entry, line=line)
        outer = self.scope
        self.scope = _Scope(outer)
        if not is_entry and self.peek() == "(":
            function.returns = self.parse_params(function)
        function.name = self.take()
        if self.peek() == "(":
            function.params = self.parse_params(function)
        for var in function.params + function.returns:
            self.scope.names[var.name] = var
        while self.peek() not in ("{", ";"):
            text = self.take()
            if not text.startswith("."):
                raise self.error(f"unexpected {text!r} in the declaration of {function.name}")
            values = []
            while self.kinds[self.i] in ("num", "str") or self.peek() == ",":
                if self.kinds[self.i] == "num":
                    values.append(self.integer())
                else:
                    self.i += 1
            function.directives[text[1:]] = tuple(values)
        if self.accept(";"):
            self.scope = outer
            self.module.functions.setdefault(function.name, function)
            return
        self.function = function
        function.body = []
        self.loc = (0, 0)
        self.expect("{")
        self.parse_block()
        self.resolve_labels(function)
        self.scope = outer
        self.function = None
        self.module.functions[function.name] = function

    def resolve_labels(self, function: Function) -> None:
        refs = [op for ins in function.body if isinstance(ins, Instr) for op in ins.operands if isinstance(op, LabelRef)]
        refs += [ref for names in function.targets.values() for ref in names]
        for ref in refs:
            scope = ref.scope
            while scope is not None and ref.name not in scope.labels:
                scope = scope.parent
            if scope is not None:
                ref.target = scope.labels[ref.name]

    # -- function bodies
    def parse_block(self) -> None:
        body = self.function.body
        while True:
            kind, text = self.kinds[self.i], self.texts[self.i]
            if kind == "end":
                raise self.error("end of file inside a function")
            if text == "}":
                self.i += 1
                return
            if text == "{":
                self.i += 1
                outer = self.scope
                self.scope = _Scope(outer)
                self.parse_block()
                self.scope = outer
            elif text == ";":
                self.i += 1
            elif text[0] == ".":
                self.parse_directive(text)
            elif kind == "word" and self.texts[self.i + 1] == ":":
                if self.texts[self.i + 2] in (".branchtargets", ".calltargets", ".callprototype"):
                    self.parse_targets(text)
                    continue
                label = Label(text, self.lines[self.i])
                if text in self.scope.labels:
                    raise self.error(f"label {text} defined twice in one scope")
                self.scope.labels[text] = label
                body.append(label)
                self.i += 2
            else:
                body.append(self.parse_instruction())

    def parse_targets(self, name: str) -> None:
        kind = self.texts[self.i + 2]
        self.i += 3
        refs: list = []
        if kind == ".callprototype":
            while self.take() != ";":
                pass
        else:
            while not self.accept(";"):
                refs.append(LabelRef(self.take(), self.scope))
                self.accept(",")
        self.function.targets[name] = refs

    def parse_directive(self, text: str) -> None:
        if text == ".reg":
            self.i += 1
            vector = 1
            if self.peek() in (".v2", ".v4"):
                vector = int(self.take()[2:])
            type_ = self.take()[1:]
            if type_ not in TYPE_BITS:
                raise self.error(f"unknown register type .{type_}")
            while True:
                name = self.take()
                if self.accept("<"):
                    self.scope.ranges.append((name, self.integer(), type_))
                    self.expect(">")
                elif vector > 1:
                    self.scope.names[name] = Vec([Reg(f"{name}.{'xyzw'[k]}", type_) for k in range(vector)])
                else:
                    self.scope.names[name] = Reg(name, type_)
                if self.accept(";"):
                    return
                self.expect(",")
        elif text in _SPACES:
            self.parse_variables(self.function.variables, extern=False)
        elif text == ".loc":
            self.parse_loc()
        elif text == ".file":
            self.parse_file()
        elif text == ".pragma":
            while self.take() != ";":
                pass
        else:
            raise self.error(f"unknown directive {text}")

    def parse_instruction(self) -> Instr:
        line = self.lines[self.i]
        pred, neg = None, False
        if self.accept("@"):
            neg = self.accept("!")
            pred = self.lookup(self.take())
            if not isinstance(pred, Reg) or pred.cls != "p":
                raise self.error("the guard of an instruction must be a predicate register")
        if self.kinds[self.i] != "word":
            raise self.error(f"expected an instruction, found {self.peek()!r}")
        op = self.take()
        operands = []
        labels = op.split(".")[0] in ("bra", "brx", "call")
        while not self.accept(";"):
            operands.append(self.parse_operand(labels))
            if not self.accept(","):
                self.expect(";")
                break
        return Instr(op, operands, pred, neg, line, self.loc)

    def lookup(self, name: str):
        hit = self.scope.find(name)
        if hit is not None:
            return Sym(hit) if isinstance(hit, Var) else hit
        if name in _SPECIAL_ROOTS:
            return Special(name)
        head, _, tail = name.rpartition(".")
        if head in _SPECIAL_ROOTS and tail in _VECTOR_FIELDS:
            return Special(name)
        if name.startswith(("%envreg", "%pm")):
            return Special(name)
        if name == "WARP_SZ":
            return Imm(32)
        if name == "_":
            return Sink()
        if head and tail in _VECTOR_FIELDS:
            vec = self.scope.find(head)
            if isinstance(vec, Vec):
                return vec.items[_VECTOR_FIELDS[tail]]
        if name in self.module.functions:
            return FunctionRef(name)
        raise self.error(f"unknown name {name!r}")

    def parse_operand(self, labels: bool):
        text = self.peek()
        if text == "{":
            self.i += 1
            items = []
            while not self.accept("}"):
                items.append(self.parse_operand(False))
                if not self.accept(","):
                    self.expect("}")
                    break
            return Vec(items)
        if text == "(":
            self.i += 1
            items = []
            while not self.accept(")"):
                items.append(self.parse_operand(False))
                if not self.accept(","):
                    self.expect(")")
                    break
            return Paren(items)
        if text == "[":
            self.i += 1
            base, offset = self.parse_address()
            extra = None
            if self.accept(","):
                extra = self.parse_operand(False)
            self.expect("]")
            return Mem(base, offset, extra)
        if text == "!":
            self.i += 1
            reg = self.lookup(self.take())
            return Not(reg)
        if text == "-" or self.kinds[self.i] == "num":
            return self.parse_literal()
        if self.kinds[self.i] != "word":
            raise self.error(f"unexpected {text!r} in an operand")
        self.i += 1
        if labels:
            hit = self.scope.find(text)
            if isinstance(hit, Reg):
                return hit
            return LabelRef(text, self.scope)
        value = self.lookup(text)
        if self.accept("|"):
            return Pair(value, self.lookup(self.take()))
        if isinstance(value, Sym) and self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            return Sym(value.var, value.offset + sign * self.integer())
        if isinstance(value, Reg) and self.peek() == "+":  # %r1+4 as a value is not PTX; as an address it is
            raise self.error(f"unexpected + after {text}")
        return value

    def parse_literal(self) -> Imm:
        negative = self.accept("-")
        if self.kinds[self.i] != "num":
            raise self.error(f"expected a number, found {self.peek()!r}")
        imm = parse_number(self.take())
        if negative:
            if imm.kind == "int":
                imm.value = -imm.value
            else:
                imm.value = -imm.value
                imm.bits ^= 1 << (31 if imm.kind == "f32" else 63)
        return imm

    def parse_address(self):
        """base [+|- constant]; a bare number is an absolute address."""
        if self.kinds[self.i] == "num" or self.peek() == "-":
            return Imm(0), self.integer()
        base = self.lookup(self.take())
        offset = 0
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            offset += sign * self.integer()
        if isinstance(base, Sym):
            offset += base.offset
            base = Sym(base.var)
        return base, offset


def parse(text: str) -> Module:
    """Parse one PTX file. Raises PtxError with the PTX line for anything that is not PTX."""
    return _Parser(text).parse()
