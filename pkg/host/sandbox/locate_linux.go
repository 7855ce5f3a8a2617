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

// A location is the target of a path: the directory dir, or the non-directory file in it, or the missing elements rest
// below it. dir has no symbolic links. A file with the name rest[0], or a directory that the user may not enter,
// may be in the way of rest.
type location struct {
	dir  string
	file string
	rest []string
}

// Locate resolves the symbolic links of a path as a [Mount] does. missing is the number of last elements of real
// that do not exist, or that the user cannot see.
func Locate(name string) (real string, missing int, err error) {
	p, err := locate(name)
	return p.path(), len(p.rest), err
}

// locate resolves a path and its symbolic links as far as its elements exist.
func locate(name string) (location, error) {
	const maxLinks = 40 // the kernel's limit
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
			return location{}, err
		case info.IsDir():
			dir, todo = next, todo[1:]
		case info.Mode()&fs.ModeSymlink != 0:
			if links++; links > maxLinks {
				return location{}, &fs.PathError{Op: "follow", Path: name, Err: unix.ELOOP}
			}
			target, err := os.Readlink(next)
			if err != nil {
				return location{}, err
			}
			if path.IsAbs(target) {
				dir = "/"
			}
			todo = slices.Concat(strings.Split(target, "/"), todo[1:])
		case len(todo) > 1:
			return missing(name, dir, todo)
		default:
			return location{dir: dir, file: element}, nil
		}
	}
	return location{dir: dir}, nil
}

func missing(name, dir string, todo []string) (location, error) {
	p := location{dir: dir}
	for _, element := range todo {
		switch element {
		case "", ".":
		case "..":
			return location{}, fmt.Errorf("%s contains \"..\" after a directory that does not exist: %s", name,
				path.Join(dir, strings.Join(todo, "/")))
		default:
			p.rest = append(p.rest, element)
		}
	}
	return p, nil
}
