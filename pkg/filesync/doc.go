// Package filesync keeps a directory of a container as one on the laptop is: one way, from the Source to the Target.
//
//	laptop                                            container
//
//	editor, git, compiler
//	   │ a save
//	watcher ── paths that may have changed            Target.Serve
//	   │ quiet for 15 ms, or 50 ms have passed           ▲
//	Source: what differs from what the target has ── tar ┘── temporary file, rename ── Dir
//	   ▲                                                 │
//	   └──────────── acknowledged, what failed ──────────┘── OnSync, once for each round
//
// A Source goes round like this, for as long as Run does:
//
//	dialing ──▶ hello ──▶ comparing ──▶ sending ──▶ waiting ◀─────────────────┐
//	   ▲                  all paths,    a round        │ paths changed        │
//	   │                  both ends        ▲           ▼                      │
//	   │                                   ├──── examining: those paths ── nothing differs
//	   │                                   │           ▲
//	   │                                   │           │ watcher overflowed, ignore file changed,
//	   │                                   │           │ a minute has passed: all paths
//	   └──── the connection breaks, in any state       └── a path is gone: after 50 ms it is examined again,
//	                                                       since an editor may be about to put it back
//
// # What is the same at both ends
//
// Regular files, directories (empty ones too) and symbolic links, their permissions (of directories, the owner's are always
// all there, and those of a link are nobody's) and the times of files. Not owners, hard links, extended attributes, set-user-ID
// bits, nor pipes, sockets and devices. Links are copied as links, wherever they lead.
//
// Two files are the same if size, permissions and modification time are; if only the size is, their SHA-256 decides, and what is
// missing is the time. On each new connection all files are compared, and those that differ are sent: the laptop's win. After
// that, what changes on the laptop is; what the container changes by itself stays as it is until the next connection, or until
// the laptop's changes too.
//
// A Target removes only what a Source has named to it, and remembers that across connections: what was in the image and is not
// on the laptop stays. A Target that is new remembers nothing, so that what disappears from the laptop while there is no Target
// stays as well. A directory stays when it holds something that stays. What becomes ignored, and what cannot be read, stays as it
// was.
//
// # In which order
//
// Each file is written beside its place and put there by a rename, so nobody reads half of one, and one that changed is never
// missing. In a round, directories come before what they hold, big files last, and what is gone is removed after all else:
// a renamed file is at its new place before it is gone from its old one.
//
// A file that changes while it is read is not put into place, and is read again; from the third time on it is sent as it was
// read, since one that is written all the time would never arrive otherwise. A big one has to be at rest for 100 ms first, for
// which it has ten seconds.
//
// # Ignored
//
// Config.Ignore, and a file .kubevpnignore in the directory, or if there is none its .gitignore, have the patterns of gitignore(5).
// Only the one in the directory itself is read, not those below it. Ignored from the beginning are what Git and editors keep for
// themselves (defaultIgnore); a pattern with "!" takes that back.
//
// # Watching
//
// fsnotify watches each directory. Those that the kernel has no watches left for (fs.inotify.max_user_watches) are looked at
// every second instead, which Status says and the log once, with what to do. Every minute all of it is looked at, since file
// systems over a network do not report what others change.
//
// The wire format is in wire.go.
package filesync
