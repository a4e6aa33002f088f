// A browser starts no worker for a page that was opened from the file system. There, the search runs in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.loaded = new Promise((done) => {
        const script = this.inside.document.createElement("script");
        this.inside.postMessage = (data) => this.answer(data);
        script.src = url;
        script.onload = done;
        this.inside.document.body.append(script);
      });
    }

    answer(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    }

    postMessage(data) {
      this.loaded.then(() => {
        const message = new MessageEvent("message", { data });
        this.inside.dispatchEvent(message);
      });
    }

    terminate() {}
  };
}
