package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A place is where a path leads: to the directory dir; to file, which is none, in it; or, with rest, to what is missing
// below it. dir has no symbolic links. What is missing may be hidden by a file of the name rest[0], or by directories that
// may not be entered.
type place struct {
	dir  string
	file string
	rest []string
}

// locate follows a path, symbolic links included, as far as it leads.
func locate(name string) (place, error) {
	const maxLinks = 40 // as the kernel has it
	links := 0
	dir, todo := "/", strings.Split(name, "/")
	for len(todo) > 0 {
		element := todo[0]
		switch element {
		case "", ".":
			todo = todo[1:]
			continue
		case "..":
			dir, todo = path.Dir(dir), todo[1:]
			continue
		}
		next := path.Join(dir, element)
		info, err := os.Lstat(next)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
			return missing(name, dir, todo)
		case err != nil:
			return place{}, err
		case info.IsDir():
			dir, todo = next, todo[1:]
		case info.Mode()&fs.ModeSymlink != 0:
			if links++; links > maxLinks {
				return place{}, &fs.PathError{Op: "follow", Path: name, Err: unix.ELOOP}
			}
			target, err := os.Readlink(next)
			if err != nil {
				return place{}, err
			}
			if path.IsAbs(target) {
				dir = "/"
			}
			todo = slices.Concat(strings.Split(target, "/"), todo[1:])
		case len(todo) > 1:
			return missing(name, dir, todo)
		default:
			return place{dir: dir, file: element}, nil
		}
	}
	return place{dir: dir}, nil
}

func missing(name, dir string, todo []string) (place, error) {
	p := place{dir: dir}
	for _, element := range todo {
		switch element {
		case "", ".":
		case "..":
			return place{}, fmt.Errorf("%s leads out of a directory that is not there: %s", name, path.Join(dir, strings.Join(todo, "/")))
		default:
			p.rest = append(p.rest, element)
		}
	}
	return p, nil
}
