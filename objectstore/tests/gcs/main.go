// The program gcs plays Google Cloud Storage in tests: objects are kept by fake-gcs-server, which speaks Google's JSON API. The
// crate object_store speaks the XML API, of which fake-gcs-server has a part only. This program answers the
// requests of the crate and asks fake-gcs-server by JSON: https://cloud.google.com/storage/docs/xml-api/reference-methods.
package main

import (
	"bytes"
	"crypto/md5"
	"encoding/base64"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

const generation = "X-Goog-Generation"

// An upload in parts that is neither complete nor aborted.
type upload struct {
	object string
	parts  map[int][]byte
}

type store struct {
	server  *fakestorage.Server
	json    http.Handler
	mutex   sync.Mutex
	uploads map[string]upload
	begun   int
}

type part struct {
	PartNumber int
	ETag       string
}

type listed struct {
	Key          string
	Size         int64
	LastModified string
	ETag         string
}

type prefix struct{ Prefix string }

type list struct {
	XMLName               xml.Name `xml:"ListBucketResult"`
	Contents              []listed
	CommonPrefixes        []prefix
	NextContinuationToken string `xml:",omitempty"`
}

func main() {
	address := flag.String("address", "127.0.0.1:4443", "address to listen at")
	bucket := flag.String("bucket", "bucket", "name of the bucket that is there")
	flag.Parse()
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{NoListener: true, Writer: io.Discard})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: *bucket})
	played := &store{server: server, json: server.HTTPHandler(), uploads: map[string]upload{}}
	log.Fatal(http.ListenAndServe(*address, played))
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	bucket, object, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	if _, err := s.server.ListObjectsWithOptionsPaginated(bucket, fakestorage.ListOptions{MaxResults: 1}); err != nil {
		refuse(w, http.StatusNotFound, "NoSuchBucket", "The specified bucket does not exist.")
		return
	}
	switch {
	case object == "" && r.Method == http.MethodGet:
		s.list(w, bucket, query)
	case r.Method == http.MethodPost && query.Has("uploads"):
		s.begin(w, bucket+"/"+object)
	case r.Method == http.MethodPut && query.Has("uploadId"):
		s.putPart(w, r, query)
	case r.Method == http.MethodPost && query.Has("uploadId"):
		s.complete(w, r, bucket, object, query.Get("uploadId"))
	case r.Method == http.MethodDelete && query.Has("uploadId"):
		s.abort(w, query.Get("uploadId"))
	case r.Method == http.MethodPut && r.Header.Get("X-Goog-Copy-Source") != "":
		s.copy(w, r, bucket, object)
	case r.Method == http.MethodPut:
		content, err := whole(r)
		if err != nil {
			refuse(w, http.StatusBadRequest, "IncompleteBody", err.Error())
			return
		}
		s.put(w, bucket, object, r.Header.Get("X-Goog-If-Generation-Match"), content)
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		s.get(w, r, bucket, object)
	case r.Method == http.MethodDelete:
		deleted := s.ask(http.MethodDelete, jsonPath(bucket, object), nil)
		if deleted.Code >= 300 {
			refuse(w, deleted.Code, "NoSuchKey", "The specified key does not exist.")
			return
		}
		w.WriteHeader(http.StatusNoContent)
	default:
		refuse(w, http.StatusNotImplemented, "NotImplemented", r.Method+" is not played")
	}
}

// ask sends a request to fake-gcs-server.
func (s *store) ask(method, path string, content []byte) *httptest.ResponseRecorder {
	reply := httptest.NewRecorder()
	s.json.ServeHTTP(reply, httptest.NewRequest(method, path, bytes.NewReader(content)))
	return reply
}

// whole reads the content of a request. One that breaks off, or is not what its checksum says, is an error.
func whole(r *http.Request) ([]byte, error) {
	content, err := io.ReadAll(r.Body)
	if err == nil && r.ContentLength >= 0 && int64(len(content)) != r.ContentLength {
		err = fmt.Errorf("%d of %d bytes came", len(content), r.ContentLength)
	}
	sum := md5.Sum(content)
	if said := r.Header.Get("Content-Md5"); err == nil && said != "" && said != base64.StdEncoding.EncodeToString(sum[:]) {
		err = fmt.Errorf("the content has not the MD5 sum %s", said)
	}
	return content, err
}

// put stores an object and says with which generation and tag. If match is a generation, the object's must be that one, or
// with 0 there must be none.
func (s *store) put(w http.ResponseWriter, bucket, object, match string, content []byte) bool {
	query := url.Values{"uploadType": {"media"}, "name": {object}}
	if match != "" {
		query.Set("ifGenerationMatch", match)
	}
	stored := s.ask(http.MethodPost, "/upload/storage/v1/b/"+url.PathEscape(bucket)+"/o?"+query.Encode(), content)
	if stored.Code >= 300 {
		code := "InternalError"
		if stored.Code == http.StatusPreconditionFailed {
			code = "PreconditionFailed"
		}
		refuse(w, stored.Code, code, strings.TrimSpace(stored.Body.String()))
		return false
	}
	head := s.ask(http.MethodHead, downloadPath(bucket, object), nil)
	w.Header().Set("ETag", head.Header().Get("ETag"))
	w.Header().Set(generation, head.Header().Get(generation))
	return true
}

func (s *store) get(w http.ResponseWriter, r *http.Request, bucket, object string) {
	path := downloadPath(bucket, object)
	head := s.ask(http.MethodHead, path, nil)
	if head.Code == http.StatusNotFound {
		refuse(w, http.StatusNotFound, "NoSuchKey", "The specified key does not exist.")
		return
	}
	if match := r.Header.Get("If-Match"); match != "" && match != head.Header().Get("ETag") {
		refuse(w, http.StatusPreconditionFailed, "PreconditionFailed", "The object has another ETag.")
		return
	}
	inner := r.Clone(r.Context())
	inner.URL = &url.URL{Path: "/download/storage/v1/b/" + bucket + "/o/" + object, RawPath: path, RawQuery: r.URL.RawQuery}
	inner.RequestURI = inner.URL.RequestURI()
	s.json.ServeHTTP(w, inner)
}

func (s *store) list(w http.ResponseWriter, bucket string, query url.Values) {
	most, _ := strconv.Atoi(query.Get("max-keys"))
	found, err := s.server.ListObjectsWithOptionsPaginated(bucket, fakestorage.ListOptions{
		Prefix: query.Get("prefix"), Delimiter: query.Get("delimiter"), StartOffset: query.Get("start-after"),
		MaxResults: most, PageToken: query.Get("continuation-token"),
	})
	if err != nil {
		refuse(w, http.StatusBadRequest, "InvalidArgument", err.Error())
		return
	}
	answer := list{NextContinuationToken: found.NextPageToken}
	for _, object := range found.Objects {
		// JSON begins with the name that is given, XML behind it.
		if object.Name != query.Get("start-after") {
			changed, tag := object.Updated.UTC().Format(time.RFC3339Nano), fmt.Sprintf("%q", object.Etag)
			answer.Contents = append(answer.Contents, listed{object.Name, object.Size, changed, tag})
		}
	}
	for _, name := range found.Prefixes {
		answer.CommonPrefixes = append(answer.CommonPrefixes, prefix{name})
	}
	say(w, http.StatusOK, answer)
}

func (s *store) begin(w http.ResponseWriter, object string) {
	s.mutex.Lock()
	s.begun++
	id := strconv.Itoa(s.begun)
	s.uploads[id] = upload{object, map[int][]byte{}}
	s.mutex.Unlock()
	say(w, http.StatusOK, struct {
		XMLName  xml.Name `xml:"InitiateMultipartUploadResult"`
		UploadId string
	}{UploadId: id})
}

func (s *store) putPart(w http.ResponseWriter, r *http.Request, query url.Values) {
	content, err := whole(r)
	number, wrong := strconv.Atoi(query.Get("partNumber"))
	if err != nil || wrong != nil {
		refuse(w, http.StatusBadRequest, "IncompleteBody", fmt.Sprint(err, wrong))
		return
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	begun, is := s.uploads[query.Get("uploadId")]
	if !is {
		refuse(w, http.StatusNotFound, "NoSuchUpload", "The requested upload was not found.")
		return
	}
	begun.parts[number] = content
	w.Header().Set("ETag", tag(content))
}

func (s *store) complete(w http.ResponseWriter, r *http.Request, bucket, object, id string) {
	var asked struct{ Part []part }
	content, err := whole(r)
	if err == nil {
		err = xml.Unmarshal(content, &asked)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, "MalformedXML", err.Error())
		return
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	begun, is := s.uploads[id]
	if !is || begun.object != bucket+"/"+object {
		refuse(w, http.StatusNotFound, "NoSuchUpload", "The requested upload was not found.")
		return
	}
	var joined []byte
	for index, one := range asked.Part {
		found, is := begun.parts[one.PartNumber]
		if !is || tag(found) != one.ETag || index > 0 && asked.Part[index-1].PartNumber >= one.PartNumber {
			refuse(w, http.StatusBadRequest, "InvalidPart", fmt.Sprintf("part %d is not there, or is another", one.PartNumber))
			return
		}
		joined = append(joined, found...)
	}
	if !s.put(w, bucket, object, "", joined) {
		return
	}
	delete(s.uploads, id)
	say(w, http.StatusOK, struct {
		XMLName xml.Name `xml:"CompleteMultipartUploadResult"`
		ETag    string
	}{ETag: w.Header().Get("ETag")})
}

func (s *store) abort(w http.ResponseWriter, id string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if _, is := s.uploads[id]; !is {
		refuse(w, http.StatusNotFound, "NoSuchUpload", "The requested upload was not found.")
		return
	}
	delete(s.uploads, id)
	w.WriteHeader(http.StatusNoContent)
}

func (s *store) copy(w http.ResponseWriter, r *http.Request, bucket, object string) {
	source, err := url.PathUnescape(r.Header.Get("X-Goog-Copy-Source"))
	from, name, is := strings.Cut(source, "/")
	if err != nil || !is {
		refuse(w, http.StatusBadRequest, "InvalidArgument", "x-goog-copy-source is no bucket and object")
		return
	}
	found := s.ask(http.MethodGet, downloadPath(from, name), nil)
	if found.Code >= 300 {
		refuse(w, http.StatusNotFound, "NoSuchKey", "The specified key does not exist.")
		return
	}
	s.put(w, bucket, object, r.Header.Get("X-Goog-If-Generation-Match"), found.Body.Bytes())
}

func jsonPath(bucket, object string) string {
	return "/storage/v1/b/" + url.PathEscape(bucket) + "/o/" + url.PathEscape(object)
}

func downloadPath(bucket, object string) string {
	return "/download" + jsonPath(bucket, object)
}

func tag(content []byte) string {
	return fmt.Sprintf("\"%x\"", md5.Sum(content))
}

func say(w http.ResponseWriter, status int, answer any) {
	content, err := xml.Marshal(answer)
	if err != nil {
		log.Fatal(err)
	}
	w.Header().Set("Content-Type", "application/xml; charset=UTF-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(content)))
	w.WriteHeader(status)
	w.Write(content)
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	say(w, status, struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
	}{Code: code, Message: message})
}
