"""Kernel families: operators, their references and their providers. Import as `qinductor.kernels`.

Nothing is imported here: run from the repository's root, other libraries take this folder for the
package `kernels` and import it when they look for that.
"""
