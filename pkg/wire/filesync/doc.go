// Package filesync keeps a directory of a container equal to one on the laptop, in one direction.
//
//	laptop                                                container
//
//	editor, git, compiler
//	   │ a save
//	watcher: paths that may have changed
//	   │ quiet for 15 ms, or 50 ms have passed
//	tree: what the laptop has
//	   │
//	Source: what differs from what the container has ══ a round: package remotefs ══▶ remotefs.Server
//	   ▲                                                     │ OpPut: beside its place, then renamed
//	   └─────────────────────── answers ◀────────────────────┘ OpSynced: Server.Synced, once for each round
//
// The Source remembers what the container received. On each connection it first asks what of that is still there. From
// then on it compares its tree with that and sends the difference, a round for each save. A new Source knows of
// nothing, so its first round sends everything.
//
// # What is copied
//
// Regular files, directories (also empty ones) and symbolic links, with their permissions and the modification times of
// files. Directories always keep all permissions of their owner. Owners, hard links, extended attributes, set-user-ID
// bits, pipes, sockets and devices are not copied. Links are copied as links, wherever they lead.
//
// A file differs if its size, permissions or modification time do. It is then sent as a whole. A change in the
// container stays until the laptop changes the same path or the connection breaks; then the laptop's version replaces
// it.
//
// A Source removes only paths that it has sent. Files of the image stay, and so does a directory that contains one.
// Paths that become ignored or unreadable on the laptop stay too.
//
// # Order
//
// A reader in the container sees the old file or the new one, never a part, and never a gap. In a round, directories
// come first, parents before children; then files and links, many at once; then big files; and then removals, children
// before parents. A path has to be gone for 50 ms before it is removed, since editors and Git replace files.
//
// A file that changes while it is read is discarded and read again after 100 ms, and a file of 8 MiB or more has to
// rest for 100 ms first. After ten seconds it is sent as it is, since a file that is always written would never arrive.
//
// # What the Source keeps
//
// The plan of a round compares the entries of the tree with these:
//
//	                 who adds a path               who clears it                effect on the plan
//	has.sent         send; verify, if the          remove; verify, if it is     other than in the tree: sent; not in the
//	                 container has another one     gone                         tree: removed
//	rejected         unread, its content;          read, if its time is coarse; not sent, or removed, while its entry
//	                 deliver, what was refused     run, all of them, each       stays the same
//	                                               minute
//	changing         later: it was written a       check, when it is sent;      not sent for restMost since it was
//	                 moment ago (waits) or while   plan, if it needs no sending added; not complete while there is one
//	                 it was read
//	tree.unreadable  fail, its metadata or         readPath, if it can be read  not removed, nor what is below
//	                 directory                     or is gone; readAll
//	tree.failed      the same                      round, which reports it      none
//
// What was refused counts only if the OpSynced after it is answered: else it may have arrived, and the next connection
// finds out.
//
// # Ignored files
//
// A file .kubevpnignore in the directory, or else .gitignore, has patterns of gitignore(5). Such files in
// subdirectories do not count. The private files of Git and of editors (defaultIgnore) are always ignored, unless a
// pattern with "!" includes them.
//
// # Watching
//
// fsnotify watches each directory. If the kernel has no watches left (fs.inotify.max_user_watches), everything is read
// every second, and the log says once what to do. Everything is read at least once a minute, since network file systems
// do not report the changes of others.
//
// # Why not tar over exec
//
// Tools that pipe an archive to `tar -x` in the container need tar there, write files in place, and do not learn which
// file failed. They cannot take back a file that changed while it was archived, and after a broken connection they
// start again. Rounds with an acknowledgement let clone send requests, and start the program, only when the files are
// there.
//
// It was measured with GNU tar on one machine: 200 saves of a file of 256 KiB beside 1000 others, while a program reads
// the file all the time, and the first copy of 10,000 files of 4 kB.
//
//	                            a save, median    reads without the file    reads of a part    first copy
//	tar of the changed file              20 ms                       2 %               34 %             -
//	tar of the directory                485 ms                       3 %                1 %         0.7 s
//	filesync (15 ms of it quiet)         23 ms                       0                  0           2.2 s
package filesync
