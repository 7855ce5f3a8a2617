package subreaper

// Program describes a program to run.
type Program struct {
	Args []string // the first is found in the last PATH of Env unless it contains a slash
	Env  []string // "NAME=value"
	// Stdin is its standard input, a descriptor of this process. Standard output and error are this process's.
	Stdin uintptr `json:"-"`
	Group bool    `json:"-"` // it leads a process group of its own
}
