"""What Kubernetes does to commands and to the values of variables before a container sees them."""

from collections.abc import Mapping


def as_kubernetes_expands(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with `$(NAME)` replaced where NAME is set, and `$$` turned into `$`.

    After the rules in the API reference of `Container.command`: a reference that cannot be resolved stays.
    """
    found, position = [], 0
    while position < len(text):
        rest = text[position:]
        if rest.startswith("$$"):
            found.append("$")
            position += 2
        elif rest.startswith("$(") and ")" in rest:
            name = rest[2 : rest.index(")")]
            found.append(variables.get(name, f"$({name})"))
            position += len(name) + 3
        else:
            found.append(rest[0])
            position += 1
    return "".join(found)
