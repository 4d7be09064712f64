// The search of the site runs in a Worker, which browsers refuse to start from file://. There this class takes its place:
// the same script runs in a hidden iframe, and messages are passed between the two windows.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => {
        this.start = () => resolve(frame.contentWindow)
      })
      window.addEventListener("message", event => {
        if (event.source === frame.contentWindow && event.data && "fromWorker" in event.data) {
          const data = event.data.fromWorker
          if (data === null) this.start()
          else this.dispatchEvent(new MessageEvent("message", { data }))
        }
      })
      frame.srcdoc =
        "<script>" +
        "window.postMessage = data => parent.postMessage({ fromWorker: data }, '*');" +
        "window.importScripts = (...urls) => Promise.all(urls.map(url => new Promise(done => {" +
        "  const script = document.createElement('script');" +
        "  script.src = url; script.onload = done; document.head.append(script)" +
        "})));" +
        "</script>" +
        `<script src="${new URL(script, location.href)}"></script>` +
        "<script>postMessage(null)</script>"
      document.documentElement.append(frame)
    }

    postMessage(data) {
      this.ready.then(frame => frame.dispatchEvent(new frame.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
