package podenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Mount is a mount of a volume in the container's file system.
type Mount struct {
	Path     string // absolute
	Volume   string
	SubPath  string // path within the volume; "" for all of it
	Source   string // a file or directory of this machine that replaces it; "" if Volumes returns the volume
	ReadOnly bool
	Remote   bool // its files stay in the pod (Remote and RemoteWritable)
}

// Values of Source.Here for volumes whose files stay in the pod.
const (
	Remote         = "remote"
	RemoteWritable = "remote:rw"
)

// Volume is the content of a volume.
type Volume struct {
	Name  string
	Empty bool   // an empty directory that the container may write to
	Files []File // sorted by path
}

// File is a file of a volume.
type File struct {
	Path string // relative, with slashes, within the volume
	Mode fs.FileMode
	Data []byte
}

// onNode returns the error for a volume whose files only the node can reach.
func onNode(name string) error {
	return fmt.Errorf("its content is in the cluster only; --volume %s=remote mounts it, and =DIRECTORY uses a "+
		"directory of this machine", name)
}

// Volumes returns the container's mounts, in the order in which to mount them, and their volumes. It omits mounts
// that it cannot read and returns a Problem for each.
func (r *Reader) Volumes(ctx context.Context) ([]Mount, []Volume, []Problem) {
	mounts, volumes, problems := Volumes(ctx, r)
	return mounts[r.container.Name], volumes, problems
}

// Volumes reads the volumes of several containers of one pod, like [Reader.Volumes]. It returns the mounts by
// container, and each volume once.
func Volumes(ctx context.Context, readers ...*Reader) (map[string][]Mount, []Volume, []Problem) {
	all := map[string][]Mount{}
	read := map[string]volumeRead{}
	var problems []Problem
	for _, r := range readers {
		mounts, more := r.mounts(ctx, read)
		r.ahead = nil // the next call sees changes
		all[r.container.Name] = mounts
		for _, p := range more {
			if !slices.ContainsFunc(problems, func(o Problem) bool { return o.Error() == p.Error() }) {
				problems = append(problems, p)
			}
		}
	}
	var volumes []Volume
	for _, name := range slices.Sorted(maps.Keys(read)) {
		if v := read[name]; v.err == nil {
			volumes = append(volumes, v.volume)
		}
	}
	return all, volumes, problems
}

// volumeRead is the result of reading a volume.
type volumeRead struct {
	volume Volume
	err    error
}

// mounts returns the container's mounts, and adds their volumes to read.
func (r *Reader) mounts(ctx context.Context, read map[string]volumeRead) ([]Mount, []Problem) {
	e := environment{Reader: r, objects: r.objects(ctx), known: map[string]Variable{}}
	var mounts []Mount
	for _, m := range r.container.VolumeMounts {
		made, err := e.mount(ctx, m, read)
		if err != nil {
			e.problem(fmt.Sprintf("volume %s at %s", m.Name, m.MountPath), err)
			continue
		}
		mounts = append(mounts, made)
	}
	slices.SortStableFunc(mounts, func(a, b Mount) int { return strings.Compare(a.Path, b.Path) }) // parents first
	return mounts, e.problems
}

func (e *environment) mount(ctx context.Context, m corev1.VolumeMount, read map[string]volumeRead) (Mount, error) {
	sub, err := e.subPath(ctx, m)
	if err != nil {
		return Mount{}, err
	}
	made := Mount{Path: path.Join("/", m.MountPath), Volume: m.Name, SubPath: sub, ReadOnly: m.ReadOnly}
	if dir := e.here[m.Name]; dir == Remote || dir == RemoteWritable {
		made.Remote, made.ReadOnly = true, m.ReadOnly || dir == Remote
		return made, nil
	}
	if dir, is := e.here[m.Name]; is {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return made, err
		}
		defer root.Close()
		if _, err = root.Stat(cmp.Or(sub, ".")); err == nil { // root does not follow links out of dir
			made.Source, err = filepath.EvalSymlinks(filepath.Join(dir, filepath.FromSlash(sub)))
		}
		if err != nil {
			return made, fmt.Errorf("in %s: %w", dir, err)
		}
		return made, nil
	}
	v, ok := read[m.Name]
	if !ok {
		v.volume, v.err = e.volume(ctx, m.Name)
		read[m.Name] = v
	}
	if v.err != nil {
		return Mount{}, v.err
	}
	if !v.volume.has(sub) { // the kubelet would create an empty directory, which is useless
		return Mount{}, fmt.Errorf("the volume has nothing at %s", written(m))
	}
	made.ReadOnly = m.ReadOnly || !v.volume.Empty // only the kubelet may write to other volumes
	return made, nil
}

// has reports whether a path of the volume exists or may be created.
func (v Volume) has(sub string) bool {
	return v.Empty || sub == "" || slices.ContainsFunc(v.Files, func(f File) bool {
		return f.Path == sub || strings.HasPrefix(f.Path, sub+"/")
	})
}

// written returns a mount's path within the volume as the pod spec has it. The expanded path may contain secrets.
func written(m corev1.VolumeMount) string { return cmp.Or(m.SubPathExpr, m.SubPath) }

// subPath returns a mount's path within the volume, clean and with variables expanded. It returns "" for all of the
// volume, however the pod writes that ("", ".", "./").
func (e *environment) subPath(ctx context.Context, m corev1.VolumeMount) (string, error) {
	sub := m.SubPath
	if m.SubPathExpr != "" {
		if len(e.known) == 0 {
			variables, _ := e.Environment(ctx)
			for _, v := range variables {
				e.known[v.Name] = v
			}
		}
		var missing []string
		sub = expand(m.SubPathExpr, func(name string) string {
			value := e.known[name].Value
			if value == "" {
				missing = append(missing, name)
			}
			return value
		})
		if missing != nil {
			return "", fmt.Errorf("its subPathExpr is %s, and %s has no value", m.SubPathExpr,
				strings.Join(missing, ", "))
		}
	}
	sub = path.Clean(sub)
	if !fs.ValidPath(sub) {
		return "", fmt.Errorf("%q is not a valid path within a volume", written(m))
	}
	if sub == "." {
		return "", nil
	}
	return sub, nil
}

func (e *environment) volume(ctx context.Context, name string) (Volume, error) {
	at := slices.IndexFunc(e.pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if at < 0 {
		return Volume{}, errors.New("the pod has no such volume")
	}
	source := e.pod.Spec.Volumes[at].VolumeSource
	w := writer{volume: name, key: name, files: map[string]File{}}
	var err error
	switch {
	case source.EmptyDir != nil:
		return Volume{Name: name, Empty: true}, nil
	case source.ConfigMap != nil:
		s := source.ConfigMap
		err = e.dataFiles(&w, KindConfigMap, s.Name, s.Items, s.Optional, mode(s.DefaultMode, defaultMode))
	case source.Secret != nil:
		s := source.Secret
		err = e.dataFiles(&w, KindSecret, s.SecretName, s.Items, s.Optional, mode(s.DefaultMode, defaultMode))
	case source.DownwardAPI != nil:
		e.downwardFiles(&w, source.DownwardAPI.Items, mode(source.DownwardAPI.DefaultMode, defaultMode))
	case source.Projected != nil:
		for n, s := range source.Projected.Sources {
			err := e.source(&w, strconv.Itoa(n), func(w *writer) error {
				return e.projected(ctx, w, s, mode(source.Projected.DefaultMode, defaultMode))
			})
			if err != nil { // the other sources are still useful
				e.problem("volume "+name, err)
			}
		}
	case source.PersistentVolumeClaim != nil:
		err = fmt.Errorf("PersistentVolumeClaim %s: %w", source.PersistentVolumeClaim.ClaimName, onNode(name))
	default:
		err = onNode(name)
	}
	if err != nil {
		return Volume{}, err
	}
	return Volume{Name: name, Files: slices.SortedFunc(maps.Values(w.files), func(a, b File) int {
		return strings.Compare(a.Path, b.Path)
	})}, nil
}

// source adds the files of one source of a volume. After an error it adds the last known files, so that a program
// does not lose its files because the API server did not answer.
func (e *environment) source(w *writer, name string, read func(*writer) error) error {
	one := writer{volume: w.volume, key: w.key + "/" + name, files: map[string]File{}}
	err := read(&one)
	if last, known := e.last[one.key]; err != nil && known {
		one.files = last
	} else if err == nil {
		e.last[one.key] = one.files
	}
	maps.Copy(w.files, one.files)
	return err
}

func (e *environment) projected(ctx context.Context, w *writer, s corev1.VolumeProjection, standard fs.FileMode) error {
	switch {
	case s.ConfigMap != nil:
		return e.dataFiles(w, KindConfigMap, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.Optional, standard)
	case s.Secret != nil:
		return e.dataFiles(w, KindSecret, s.Secret.Name, s.Secret.Items, s.Secret.Optional, standard)
	case s.DownwardAPI != nil:
		e.downwardFiles(w, s.DownwardAPI.Items, standard)
		return nil
	case s.ServiceAccountToken != nil:
		value, err := e.token(ctx, tokenOfProjection(s.ServiceAccountToken))
		if err != nil {
			return err
		}
		// The kubelet's mode depends on the users in the pod; here only the laptop's user reads the file.
		return w.add(s.ServiceAccountToken.Path, []byte(value), 0o600)
	}
	return errors.New("only the node can resolve a source of this kind")
}

func tokenOfProjection(s *corev1.ServiceAccountTokenProjection) tokenOf {
	of := tokenOf{audience: s.Audience, seconds: defaultTokenSeconds}
	if t := s.ExpirationSeconds; t != nil {
		of.seconds = *t
	}
	return of
}

// defaultMode is the mode that the API server sets for the files of a volume.
const defaultMode fs.FileMode = 0o644

// mode returns the mode of a volume or a file, or standard if it has none.
func mode(m *int32, standard fs.FileMode) fs.FileMode {
	if m == nil {
		return standard
	}
	return fs.FileMode(*m) & fs.ModePerm
}

// dataFiles adds the files of a ConfigMap or Secret.
func (e *environment) dataFiles(w *writer, kind, name string, items []corev1.KeyToPath, optional *bool,
	standard fs.FileMode) error {
	data, err := e.data(kind, name, true)
	if err != nil {
		return unless(absent(err, optional), err)
	}
	return w.addKeys(kind+" "+name, data, items, isTrue(optional), standard)
}

func (e *environment) downwardFiles(w *writer, items []corev1.DownwardAPIVolumeFile, standard fs.FileMode) {
	for _, item := range items {
		err := e.source(w, item.Path, func(w *writer) error {
			of := &corev1.EnvVarSource{FieldRef: item.FieldRef, ResourceFieldRef: item.ResourceFieldRef}
			value, _, err := e.from(of)
			if err != nil {
				return err
			}
			return w.add(item.Path, []byte(value), mode(item.Mode, standard))
		})
		if err != nil { // the other files are still useful
			e.problem(fmt.Sprintf("file %s of volume %s", item.Path, w.volume), err)
		}
	}
}

// writer collects a volume's files. Of two files with one path it keeps the later one, as the kubelet does.
type writer struct {
	volume string
	key    string // its key in Reader.last
	files  map[string]File
}

func (w *writer) add(name string, data []byte, m fs.FileMode) error {
	name = path.Clean(name)
	if !fs.ValidPath(name) || name == "." || strings.HasPrefix(name, "..") {
		return fmt.Errorf("%q is not a valid path within a volume", name)
	}
	w.files[name] = File{Path: name, Mode: m, Data: data}
	return nil
}

// addKeys adds all of data, or the keys that items name.
func (w *writer) addKeys(of string, data map[string][]byte, items []corev1.KeyToPath, optional bool,
	standard fs.FileMode) error {
	if len(items) == 0 {
		for k, v := range data {
			if err := w.add(k, v, standard); err != nil {
				return err
			}
		}
		return nil
	}
	for _, item := range items {
		v, ok := data[item.Key]
		if !ok {
			if optional {
				continue
			}
			return fmt.Errorf("%s has no key %q", of, item.Key)
		}
		if err := w.add(item.Path, v, mode(item.Mode, standard)); err != nil {
			return err
		}
	}
	return nil
}
