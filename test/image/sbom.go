package image

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/package-url/packageurl-go"
	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// mediaType is the type of an SBOM in a registry.
const mediaType = "application/spdx+json"

// noAssertion is the SPDX value for a field that the author did not determine.
const noAssertion = "NOASSERTION"

// ImageSBOM returns the SBOM of an image that Build made of o, in SPDX 2.3 JSON: its Debian packages, its programs and
// the Go modules in them.
func ImageSBOM(img v1.Image, ref string, o Options) ([]byte, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("image name %q: %w", ref, err)
	}
	digest, err := img.Digest()
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	lock, err := ReadLock()
	if err != nil {
		return nil, err
	}
	repository := parsed.Context()
	s := newSBOM(&v2_3.Package{
		PackageName: repository.Name(), PackageVersion: o.Labels["org.opencontainers.image.version"],
		PackageChecksums:      []common.Checksum{{Algorithm: common.SHA256, Value: digest.Hex}},
		PrimaryPackagePurpose: "CONTAINER",
		PackageExternalReferences: purl("oci", "", path.Base(repository.RepositoryStr()), digest.String(),
			map[string]string{"arch": config.Architecture, "repository_url": repository.Name()}),
	}, digest.Hex)
	for _, p := range o.Tree.Packages {
		s.addPackage(p, lock.Release)
	}
	for _, f := range o.Files {
		content, err := os.ReadFile(f.Source)
		if err != nil {
			return nil, err
		}
		s.addProgram(f.Path, content)
	}
	return s.bytes()
}

// ArchiveSBOM returns the SBOM of an archive (.tar.gz, .zip) or of a program, in SPDX 2.3 JSON: its Go programs and the
// modules in them.
func ArchiveSBOM(file, version string) ([]byte, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	sum := checksum(content)
	s := newSBOM(&v2_3.Package{
		PackageName: filepath.Base(file), PackageVersion: version, PackageFileName: filepath.Base(file),
		PackageChecksums:      []common.Checksum{{Algorithm: common.SHA256, Value: sum}},
		PrimaryPackagePurpose: "ARCHIVE",
	}, sum)
	switch {
	case strings.HasSuffix(file, ".tar.gz"), strings.HasSuffix(file, ".tgz"):
		err = s.addTar(content)
	case strings.HasSuffix(file, ".zip"):
		err = s.addZip(content)
	default:
		s.addProgram(filepath.Base(file), content)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", file, err)
	}
	if len(s.doc.Packages) == 1 {
		return nil, fmt.Errorf("%s contains no Go program", file)
	}
	return s.bytes()
}

// sbom is a document under construction.
type sbom struct {
	doc  *v2_3.Document
	root common.ElementID
	seen map[common.ElementID]bool
}

// newSBOM starts the document about root, whose content has the given checksum.
func newSBOM(root *v2_3.Package, sum string) *sbom {
	s := &sbom{
		doc: &v2_3.Document{
			SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense, SPDXIdentifier: "DOCUMENT",
			DocumentName:      root.PackageName,
			DocumentNamespace: "https://spdx.org/spdxdocs/kubevpn-" + sum,
			CreationInfo: &v2_3.CreationInfo{
				Creators: []common.Creator{{CreatorType: "Tool", Creator: "kubevpn-image"}},
				Created:  "1970-01-01T00:00:00Z", // so that the same content has the same SBOM
			},
		},
		root: "Package-root",
		seen: map[common.ElementID]bool{},
	}
	s.add(s.root, root)
	s.relate("DOCUMENT", "DESCRIBES", s.root)
	return s
}

// add adds a package, once.
func (s *sbom) add(id common.ElementID, p *v2_3.Package) {
	if s.seen[id] {
		return
	}
	s.seen[id] = true
	p.PackageSPDXIdentifier = id
	if p.PackageDownloadLocation == "" {
		p.PackageDownloadLocation = noAssertion
	}
	p.PackageLicenseConcluded, p.PackageLicenseDeclared, p.PackageCopyrightText = noAssertion, noAssertion, noAssertion
	s.doc.Packages = append(s.doc.Packages, p)
}

func (s *sbom) relate(from common.ElementID, kind string, to common.ElementID) {
	s.doc.Relationships = append(s.doc.Relationships, &v2_3.Relationship{
		RefA: common.MakeDocElementID("", string(from)), RefB: common.MakeDocElementID("", string(to)),
		Relationship: kind,
	})
}

// addPackage adds a Debian package.
func (s *sbom) addPackage(p Package, release string) {
	id := elementID("deb", p.Name, p.Version)
	s.add(id, &v2_3.Package{
		PackageName: p.Name, PackageVersion: p.Version, PackageDownloadLocation: p.URL,
		PackageSupplier:  &common.Supplier{SupplierType: "Organization", Supplier: "Debian"},
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: p.SHA256}},
		PackageExternalReferences: purl("deb", "debian", p.Name, p.Version,
			map[string]string{"arch": p.Architecture, "distro": "debian-" + release}),
	})
	s.relate(s.root, "CONTAINS", id)
}

// addProgram adds a Go program and its modules, if content is one.
func (s *sbom) addProgram(file string, content []byte) {
	info, err := buildinfo.Read(bytes.NewReader(content))
	if err != nil {
		return // a man page, or another file of an archive
	}
	program := elementID("program", file, info.Main.Version)
	s.add(program, &v2_3.Package{
		PackageName: info.Path, PackageVersion: s.doc.Packages[0].PackageVersion, PackageFileName: file,
		PackageChecksums:      []common.Checksum{{Algorithm: common.SHA256, Value: checksum(content)}},
		PrimaryPackagePurpose: "APPLICATION",
	})
	s.relate(s.root, "CONTAINS", program)
	s.addModule(program, "stdlib", strings.TrimPrefix(info.GoVersion, "go"))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		s.addModule(program, m.Path, m.Version)
	}
}

func (s *sbom) addModule(program common.ElementID, module, version string) {
	id := elementID("go", module, version)
	namespace, base := path.Split(module)
	s.add(id, &v2_3.Package{
		PackageName: module, PackageVersion: version,
		PackageExternalReferences: purl("golang", strings.TrimSuffix(namespace, "/"), base, version, nil),
	})
	s.relate(program, "DEPENDS_ON", id)
}

func (s *sbom) addTar(content []byte) error {
	plain, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		return err
	}
	for archive := tar.NewReader(plain); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		file, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		s.addProgram(h.Name, file)
	}
}

func (s *sbom) addZip(content []byte) error {
	archive, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		return err
	}
	for _, f := range archive.File {
		r, err := f.Open()
		if err != nil {
			return err
		}
		file, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil {
			return err
		}
		s.addProgram(f.Name, file)
	}
	return nil
}

func (s *sbom) bytes() ([]byte, error) {
	var b bytes.Buffer
	if err := json.Write(s.doc, &b, json.Indent("  "), json.EscapeHTML(false)); err != nil {
		return nil, fmt.Errorf("writing the SBOM: %w", err)
	}
	return b.Bytes(), nil
}

// notInID matches what an SPDX identifier cannot contain.
var notInID = regexp.MustCompile(`[^a-zA-Z0-9.]+`)

func elementID(kind, name, version string) common.ElementID {
	return common.ElementID("Package-" + notInID.ReplaceAllString(kind+"-"+name+"-"+version, "-"))
}

// purl returns the package URL by which scanners look for known vulnerabilities.
func purl(kind, namespace, name, version string, qualifiers map[string]string) []*v2_3.PackageExternalReference {
	url := packageurl.NewPackageURL(kind, namespace, name, version, packageurl.QualifiersFromMap(qualifiers), "")
	return []*v2_3.PackageExternalReference{
		{Category: "PACKAGE-MANAGER", RefType: "purl", Locator: url.ToString()},
	}
}
