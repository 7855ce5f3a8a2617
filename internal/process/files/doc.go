// Package files is the far end of `kubevpn cp` and of remote volumes: a program in a pod that serves the files of one
// of its containers.
//
//	ephemeral container, with targetContainerName      the container itself, by pods/exec
//	──────────────────────────────────────────────     ──────────────────────────────────
//	traffic files --stay: keeps the container          kubevpn files, which the laptop has copied there
//	traffic files: becomes the user of the target's      │ removes its own file
//	  │ process, and opens /proc/PID/root                │ opens /
//	  ▼                                                  ▼
//	Hello, then remotefs.Server ◀═ standard input and output, by pods/exec ═▶ the laptop
package files

// Program is the program of the image, and Command the name of the command in it and in kubevpn.
const (
	Program = "/traffic"
	Command = "files"
)

// Protocol is the version of Hello and of package remotefs. Both ends must have the same.
const Protocol = 1

// Hello is the first line of the far end, as JSON.
type Hello struct {
	Protocol int `json:"protocol"`
	// Name is "." if the path is a directory, which is then served. Otherwise it is the last element of the path, and
	// the directory above is served; nothing need exist there.
	Name string `json:"name,omitempty"`
	// Error says why nothing is served. With Unseen, it is because this program cannot look into the container.
	Error  string `json:"error,omitempty"`
	Unseen bool   `json:"unseen,omitempty"`
}
