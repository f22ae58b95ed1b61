"""Writes the stubs of the modules that define kernels: stubs.py PACKAGE_FOLDER OUTPUT_FOLDER.

Every kernel is a method of devices, which the modules make when they are imported. Here a function gets an overload for each
kind of device, and `Host`, `Npu` and `Device` the methods: arrays on the one, a `Profile` on the other. Nothing is imported,
as a build has no numpy.
"""

from __future__ import annotations

import ast
import copy
import pathlib
import sys

MODULES = ("_attention", "_matmul", "_moe", "_permute", "_rows")


def is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "kernel" for d in node.decorator_list)


def is_import(node: ast.stmt) -> bool:
    future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return isinstance(node, (ast.Import, ast.ImportFrom)) and not future


def is_public(node: ast.ClassDef | ast.FunctionDef | ast.Assign) -> bool:
    name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name
    return not name.startswith("_")


class Bodiless(ast.NodeTransformer):
    """Functions say their signatures alone."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Expr(ast.Constant(...))]
        return node


def on(device: str, kernel: ast.FunctionDef, is_method: bool) -> ast.FunctionDef:
    """The kernel on a `Host`, an `Npu`, or a `Device` that may be either: "X | Profile" is X, Profile, or both."""
    function = Bodiless().visit(copy.deepcopy(kernel))
    returns = function.returns
    if gives_profiles(kernel) and device != "Device":
        function.returns = returns.left if device == "Host" else returns.right
    function.decorator_list = []
    arguments = function.args
    place = [argument.arg for argument in arguments.kwonlyargs].index("device")
    if is_method:
        del arguments.kwonlyargs[place], arguments.kw_defaults[place]
        arguments.args.insert(0, ast.arg("self"))
    elif gives_profiles(kernel):
        function.decorator_list.append(ast.Name("overload"))
        arguments.kwonlyargs[place].annotation = ast.Name("Host | None" if device == "Host" else device)
        if device != "Host":
            arguments.kw_defaults[place] = None
    return function


def gives_profiles(kernel: ast.FunctionDef) -> bool:
    return isinstance(kernel.returns, ast.BinOp) and ast.unparse(kernel.returns.right) == "Profile"


def stub(module: ast.Module, imports: list[ast.stmt], kernels: list[ast.FunctionDef]) -> str:
    """Of a module: what is public in it, with `kernels` as methods of its devices."""
    body = list(imports)
    for node in module.body:
        if is_kernel(node):
            devices = ("Host", "Npu", "Device") if gives_profiles(node) else ("Device",)
            body += [on(device, node, is_method=False) for device in devices]
        elif is_import(node):
            body.append(node)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Assign)) and is_public(node):
            node = Bodiless().visit(node)
            if isinstance(node, ast.ClassDef) and node.name in ("Device", "Host", "Npu"):
                node.body = [member for member in node.body if getattr(member, "name", "") != "__getattr__"]
                node.body += [on(node.name, kernel, is_method=True) for kernel in kernels]
            body.append(node)
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) + "\n"


def main(package: pathlib.Path, output: pathlib.Path) -> None:
    modules = {name: ast.parse((package / f"{name}.py").read_text()) for name in MODULES}
    types = [ast.parse(f"from cubist.{name} import *").body[0] for name in MODULES]
    for name, module in modules.items():
        imports = ast.parse("from typing import overload\nfrom cubist._device import Host, Npu").body
        (output / f"{name}.pyi").write_text(stub(module, imports, []))
        types += [node for node in module.body if is_import(node) and "_device" not in ast.unparse(node)]
    kernels = [node for module in modules.values() for node in module.body if is_kernel(node)]
    device = ast.parse((package / "_device.py").read_text())
    (output / "_device.pyi").write_text(stub(device, types, kernels))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
