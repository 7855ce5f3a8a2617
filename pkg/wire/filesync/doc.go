// Package filesync keeps a directory of a container equal to one on the laptop, in one direction: from the Source to
// the Target.
//
//	laptop                                             container
//
//	editor, git, compiler
//	   │ a save
//	watcher: paths that may have changed               Target: what it received
//	   │ quiet for 15 ms, or 50 ms have passed            ▲
//	tree: what the laptop has                             │ temporary file, rename
//	   │                                                  │
//	Source: what differs from what the target has ══ a round ══▶ os.Root
//	   ▲                                                  │
//	   └──────────── acknowledged, what failed ◀──────────┘── OnSync, once for each round
//
// On each connection, the Target first lists what it has received earlier and still has. From then on the Source
// compares its tree with that list and sends the difference, a round for each save. The list of a new Target is empty,
// so the first round sends everything.
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
// A Target removes only paths that it received. Files of the image stay, and so does a directory that contains one.
// Paths that become ignored or unreadable on the laptop stay too.
//
// # Order
//
// Each file is written to a temporary file, which is then renamed: a reader in the container sees the old file or the
// new one, never a part, and never a gap. In a round, directories come first, big files last, and removals after
// everything else. A path has to be gone for 50 ms before it is removed, since editors and Git replace files.
//
// A file that changes while it is read is discarded and read again after 100 ms, and a file of 8 MiB or more has to
// rest for 100 ms first. After ten seconds it is sent as it is, since a file that is always written would never arrive.
//
// # What the Source keeps
//
// The plan of a round compares the entries of the tree with these:
//
//	                 who adds a path                     who clears it                       effect on the plan
//	target           readTarget; acknowledged, what was  acknowledged, what was removed      other than in the tree: sent; not in
//	                 sent                                                                    the tree: removed
//	rejected         unread, its content; acknowledged,  read, if its time is coarse; run,   not sent while its entry stays the
//	                 if the target failed                all of them once a minute           same
//	changing         later: it was written a moment ago  sendFile, when it is sent; plan,    not sent for restMost since it was
//	                 (waits) or while it was read        if it needs no sending any more     added; not complete while there is one
//	tree.unreadable  fail, its metadata or directory     readPath, if it can be read or is   not removed, nor what is below
//	                                                     gone; readAll
//	tree.failed      the same                            round, which reports it             none
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
//
// The wire format is in wire.go.
package filesync
