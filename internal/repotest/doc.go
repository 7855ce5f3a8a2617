// Package repotest holds the tests of the repository as a whole: which package may import which, formatting,
// package documentation, no side effects of imports, documentation that says what the code does, and that the
// code compiles on every system that it should. It has no code of its own.
package repotest
